"""Read Parquet that sparkhvd did not write: any row groups, encodings and compression.

The driver lists files, reads footers and the first rows (`dataset`, `footers`, `manifest`); a rank reads rows by number (`source`).

Each module imports only those above it:

    dataset    files and schema of a data set
    petastorm  petastorm's codecs as decoders
    source     rows by number
    manifest   the manifest that ranks read by
"""
