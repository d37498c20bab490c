"""The steps around the two forwards, and the verify's attention, as Triton kernels; contracts: `torch_ops`."""
