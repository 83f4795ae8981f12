"""Pictures that requests bring: found in their messages, fetched, decoded."""
