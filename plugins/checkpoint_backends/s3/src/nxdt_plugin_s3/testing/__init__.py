"""What tests of S3 need: a real server on 127.0.0.1, and a proxy that injects HTTP faults."""
