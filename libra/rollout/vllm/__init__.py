"""vLLM as an engine of Libra: an AsyncLLM in its own processes, and extensions for them."""
