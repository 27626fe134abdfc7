"""Text to token ids: files and datasets read as documents, tokenizers, and the tokenized corpus in the cache."""
