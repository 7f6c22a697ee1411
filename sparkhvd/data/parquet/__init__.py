"""Read Parquet that sparkhvd did not write: any row groups, encodings and compression.

Each module imports only those above it:

    petastorm  petastorm's codecs as decoders
    source     rows by number
    discover   files, folders `column=value`, schemas and footers, on the driver
"""
