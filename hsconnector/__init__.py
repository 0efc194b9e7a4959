"""Hidden states out of a running vLLM engine, row by row, as drafter-training data.

This import is light: neither torch nor vllm is loaded. See `hsconnector.client` for reading captures,
`hsconnector.connector` for the part that vLLM loads, `hsconnector.layout` for the engine's KV-cache rules.
"""

from hsconnector.errors import HSConnectorError

__all__ = ["HSConnectorError", "__version__"]
__version__ = "0.1.0"
