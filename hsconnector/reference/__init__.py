"""What hidden states should be: a Hugging Face pass, and captures compared with it."""
