"""Documents of JSON and YAML, tensors beside them, and the files they are in; a file or a message may hold anything.

regular_files  opened, read whole and written whole  json_and_yaml  parsed to plain values, within bounds
fields         what a document's fields may hold     encoding       state to JSON and tensors, and back
messages       the same for what ranks send each other
"""
