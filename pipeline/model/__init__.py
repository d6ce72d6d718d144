"""The decoder on two streams, for the Llama family and GPT-NeoX, and its names in Hugging Face's folders."""
