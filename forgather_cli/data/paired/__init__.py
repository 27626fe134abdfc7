"""Examples of two sides, for encoder-decoders: pairs (``seq2seq``), and text with a part taken out (``ul2``).

sentinels.py  a tokenizer with tokens that stand for spans
denoise.py    windows of text to examples, by denoisers
rows.py       examples to rows of two lengths, and to batches
ul2.py        a corpus or a stream as rows of denoised windows
seq2seq.py    files of pairs as rows
"""
