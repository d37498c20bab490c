"""Trains the rehearsal's own target and DFlash drafter from the standard library's sources.

Needs torch, numpy, safetensors, tokenizers and tqdm only; it never imports the engine or transformers, so that
its figures are independent of both.
"""
