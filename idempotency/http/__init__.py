"""Between HTTP and the engine: `requests` (key, fingerprint), `responses` (outcome ⇄ response), `problems`, `doors`.

The two constants are for the settings of django-cors-headers; importing them needs no settings.
"""

#: Request headers that a browser on another origin must be allowed to send. Add your own name if
#: IDEMPOTENCY["KEY_HEADER"] is set: CORS_ALLOW_HEADERS = (*default_headers, *CORS_ALLOW_HEADERS)
CORS_ALLOW_HEADERS = ("idempotency-key",)

#: Response headers that a script on another origin must be allowed to read.
CORS_EXPOSE_HEADERS = ("Idempotent-Replayed", "Retry-After", "Location", "Link", "ETag")
