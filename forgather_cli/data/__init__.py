"""Data: from documents to batches on the device. Nothing is imported here, so that a plan costs no torch.

build          a data option to datasets and tokenizer, and what a plan may know of it; splits: the same of custom data
text/          read (files to documents), corpus (which, and what is held out), encode and tokenize (to tokens in the
               cache); hf and token_stream for the ``datasets`` library, token_files for tokens that exist already
chat/          conversations, chat templates in a sandbox, targets of the assistant's turns
packing        which tokens make up a sample; samples: the map-style datasets that read them
order          the global order of samples, a function of (seed, epoch)
loaders/       which samples a rank takes of each step, batches, workers, transfer to the device
"""
