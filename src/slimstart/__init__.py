"""slimstart"""
from slimstart.graph import trace
