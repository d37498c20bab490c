"""Measure speculative decoding so that the result cannot flatter: every ratio comes from one session on one machine.

`variants` says what is compared, `plan` under which conditions, `run` starts or attaches to the servers, `unit`
measures them in rotation, `store` keeps only what is complete, `results`, `report` and `plots` tell what was measured.
Nothing here needs torch or SGLang: they run in the servers.
"""
