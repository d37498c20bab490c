"""Is the engine alive, ready, and worth its GPU: one look (`observe`), its judgement (`judge`), and who asks.

Runs wherever Python, requests and prometheus_client are: it never imports the engine, and never makes it generate.
"""
