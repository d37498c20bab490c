"""The DDTree algorithm and its place in SGLang.

`tree` is the specification; `torch_ops` does the same for a batch on any device without waiting for the host;
`kernels` picks the implementation for a device; `worker`, `algorithm` and `plugin` are the only modules that need
SGLang.
"""
