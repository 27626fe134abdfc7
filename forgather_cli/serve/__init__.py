"""``forgather serve``: a trained model behind the OpenAI API, by llama.cpp's own server."""
