"""Agents of users, which speak to the model over HTTP: their requests, and the exact tokens behind their conversations.

`messages` reads requests, `history` finds what a request continues, `replies` makes messages of generated text, `sequences` makes
training sequences of a conversation with branches. None of these does I/O.
"""
