"""Batch transfer: rows of a batch go directly from the workers that graded them to the training workers that need them.

The controller plans from metadata (`orders`); payload goes from worker to worker (`DispatchServer`, `fetch`).
"""

from libra.dispatch.batch_layout import Block, DispatchPlan, Move, Piece, balanced, contiguous, dealt, plan, replicated
from libra.dispatch.client import Fetched, Order, fetch, orders, recv_views, rows_of
from libra.dispatch.server import DispatchServer, send_views

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
    "recv_views",
    "replicated",
    "rows_of",
    "send_views",
]
