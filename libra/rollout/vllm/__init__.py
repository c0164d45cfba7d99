"""vLLM as an engine of Libra: an AsyncLLM in processes of its own, and what runs inside them."""
