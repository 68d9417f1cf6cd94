"""What tests of programs and of parts made elsewhere need: a real server, contracts, a clock."""

from paceline.core.clock import ManualClock
from paceline.testing.adapters import check_adapter
from paceline.testing.chaos import Chaos, Fault, Report, full_disk
from paceline.testing.engines import check_engine
from paceline.testing.relay import Relay
from paceline.testing.serving import Serving, serving
from paceline.testing.transports import check_transport

__all__ = [
    "Chaos",
    "Fault",
    "ManualClock",
    "Relay",
    "Report",
    "Serving",
    "check_adapter",
    "check_engine",
    "check_transport",
    "full_disk",
    "serving",
]
