"""Read Parquet of other writers: any row groups, encodings and compression.

The driver lists files and reads footers and the first rows (`dataset`, `manifest`); a rank reads rows by number (`source`).

Each module imports only those above it:

    dataset    files and schema of a data set
    petastorm  petastorm's codecs as decoders
    source     rows by number
    manifest   the manifest that ranks read by
"""
