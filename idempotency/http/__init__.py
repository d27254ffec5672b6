"""Between HTTP and the engine: `requests` (key, fingerprint), `responses` (outcome ⇄ response), `problems`, `doors`."""
