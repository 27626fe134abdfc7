"""Data: from documents to batches on the device. Nothing is imported here, so that a plan costs no torch.

splits         what a data option is to others: DataSource, which its ``maker`` names, and DataSplits; custom data too
sources        the sources of the options with one side; build: from an option to its source, and to its datasets
text/          read (files to documents), corpus (which, and what is held out), encode and tokenize (to tokens in the
               cache); hf and token_stream for the ``datasets`` library, token_files for tokens that exist already
chat/          conversations, chat templates in a sandbox, targets of the assistant's turns
packing        which tokens make up a sample; samples: the map-style datasets that read them
paired/        examples of two sides, for encoder-decoders
order          the global order of samples, a function of (seed, epoch)
loaders/       which samples a rank takes of each step, batches, workers, transfer to the device
"""
