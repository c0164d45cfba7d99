"""Batch transfer: rows of a batch go directly from the workers that graded them to the training workers that need them.

The controller plans from metadata (`orders`); payload goes from worker to worker (`DispatchServer`, `fetch`).
"""

from libra.dispatch.batch_layout import Block, DispatchPlan, Move, Piece, plan
from libra.dispatch.row_transfer import (
    DispatchServer,
    Fetched,
    Order,
    fetch,
    orders,
    recv_views,
    rows_of,
    send_views,
)

__all__ = [
    "Block",
    "DispatchPlan",
    "DispatchServer",
    "Fetched",
    "Move",
    "Order",
    "Piece",
    "fetch",
    "orders",
    "plan",
    "recv_views",
    "rows_of",
    "send_views",
]
