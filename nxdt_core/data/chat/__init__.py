"""Chat data: records, conversations and chat templates."""
