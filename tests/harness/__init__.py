"""What tests share: ranks as threads, ranks as processes, faults, Spark sessions."""
