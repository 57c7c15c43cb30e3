"""The waiting orders there are, by the name that a setting gives."""

from __future__ import annotations

from .fair_share import FairShare
from .policy import FirstComeFirstServed, LongestPrefix, PriorityOrder, WaitingOrder

WAITING_ORDERS: dict[str, type[WaitingOrder]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityOrder,
    "longest_prefix": LongestPrefix,
    "fair_share": FairShare,
}
