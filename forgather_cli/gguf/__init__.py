"""GGUF: a model as one file for llama.cpp and Ollama, proved by llama.cpp itself."""
