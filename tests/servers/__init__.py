"""Private servers for tests and benchmarks: start one, use its URL, crash it, restart it.

    from tests.servers import postgresql

    with postgresql.server(fsync=True) as database:
        database.url()       # postgres://…@127.0.0.1:…/idempotency
        database.kill()      # as after a power cut of the database host
        database.start()     # recovers, on the same port

`postgresql`, `mariadb`, `redis` and `rabbitmq` have the same `server()` and `available()`. Every server
listens on a free port of the loopback interface only, keeps its data below `.var/` (or the
temporary directory), and ends with the process that started it.
"""
