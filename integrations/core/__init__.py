"""Between stores and adapters: chunks to entries and back, keys of entries, contained errors, costs, deadlines."""
