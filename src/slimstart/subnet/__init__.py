from slimstart.subnet.batchnorm import recalibrate
from slimstart.subnet.compact import compact
from slimstart.subnet.verify import Report, trace_verified, verify
