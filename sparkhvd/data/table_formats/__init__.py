"""Read a version of a Delta or Iceberg table: its files, deleted rows, schema and identity.

The format's own library (`deltalake`, `pyiceberg`) reads the log. Ranks read the files as they read ordinary Parquet, without that
library. What this cannot give exactly is an error before any job.

Each module imports only those above it:

    where    filters of rows: parsed once, for pyarrow and for both libraries
    version  the version that a user asks for, and shared errors
    storage  storage options of a store, as both libraries name them
    delta    Delta tables
    iceberg  Iceberg tables
    table    a table of any format, by path or name
"""
