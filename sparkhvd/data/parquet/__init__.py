"""Read Parquet that sparkhvd did not write: any row groups, encodings and compression.

The driver lists files, reads footers and the first rows (`dataset`, `footers`, `manifest`); a rank reads rows by number (`source`).

Each module imports only those above it:

    petastorm  petastorm's codecs as decoders
    folders    names of files and folders `column=value`
    passes     open files, decoded from front to back
    source     rows by number
    dataset    files and schema of a data set
    footers    row groups, nulls and sizes of all files
    manifest   the manifest that ranks read by
"""
