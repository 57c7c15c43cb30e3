"""The wire: OpenAI's HTTP interface around an engine, on starlette.

Read in this order: app.py (routes), protocol.py (what a request may say), translate.py (what it
means), answer.py (from a request to its events), streaming.py (from events to bytes).
"""
