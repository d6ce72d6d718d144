"""A base that is given as a GGUF file, llama.cpp's format: dequantized into a Hugging Face
folder."""
