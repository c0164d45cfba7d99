"""The data dispatcher: rows of a batch from the workers that made them straight to those that want them.

The controller plans from metadata (`orders`); payload goes from worker to worker (`DispatchServer`, `fetch`).
"""

from libra.dispatch.batch_layout import Block, DispatchPlan, Move, Piece, balanced, contiguous, dealt, plan, replicated
from libra.dispatch.client import Fetched, Order, fetch, orders, rows_of
from libra.dispatch.server import DispatchServer

__all__ = [
    "Block",
    "DispatchPlan",
    "DispatchServer",
    "Fetched",
    "Move",
    "Order",
    "Piece",
    "balanced",
    "contiguous",
    "dealt",
    "fetch",
    "orders",
    "plan",
    "replicated",
    "rows_of",
]
