"""Read Parquet of other writers: any row groups, encodings and compression.

The driver lists files and reads footers and the first rows (`dataset`, `manifest`); a rank reads rows by number
(`source`).

Each module imports only those above it:

    dataset    files and schema of a data set
    petastorm  decoders made from petastorm's codecs
    source     reader of rows by number
    manifest   manifest for the ranks, made from all footers
"""
