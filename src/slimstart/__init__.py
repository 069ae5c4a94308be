"""slimstart"""
from slimstart.graph import trace
from slimstart.subnet import compact, verify, trace_verified
from slimstart.accounting import flops
