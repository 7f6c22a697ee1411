"""DataFrame to tensors: schema, packed Parquet, the store, and the reader of a rank."""
