"""What a model sees of its data: samples as training reads them, shown to people, and counts of them.

samples        samples of a split in its global order, with pieces, targets and documents
origins        the file and line that a document comes from, and the documents of a line
terminal       samples on a terminal; page: as one HTML page
stats          documents, tokens, targets, lengths and what was left out, by source
"""
