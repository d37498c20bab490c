"""The DDTree appliance: SGLang with draft-tree speculative decoding, run as a service."""

__version__ = "0.1.0"
