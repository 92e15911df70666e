"""What the tests share: tiny models, real engines in forked processes, servers, comparison of outputs."""
