"""Read a version of a Delta or Iceberg table: its files, deleted rows, schema and identity.

The format's own library (`deltalake`, `pyiceberg`) reads the log on the driver. Ranks read the files like ordinary
Parquet, without that library. A table that cannot be read exactly in this way raises an error before any job.

Each module imports only those above it:

    where    filters of rows, parsed once for pyarrow and for both libraries
    version  version that a user asks for, and errors that all formats share
    storage  storage options of a store under the names of both libraries
    delta    Delta tables
    iceberg  Iceberg tables
    table    table of any format, by path or name
"""
