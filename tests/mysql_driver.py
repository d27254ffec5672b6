"""Lets Django's MySQL backend use PyMySQL, which installs without a C compiler."""

from importlib.util import find_spec
from typing import Any

#: Connection options. PyMySQL reads all trusted certificates for each connection, for 70 ms.
OPTIONS: dict[str, Any] = {}


def install() -> None:
    """Use mysqlclient where it is installed, else PyMySQL in its place."""
    if find_spec("MySQLdb") is not None or find_spec("pymysql") is None:
        return
    import pymysql

    OPTIONS["ssl_disabled"] = True

    # Django asks for the mysqlclient version, not for PyMySQL's.
    pymysql.version_info = (2, 2, 7, "final", 0)
    pymysql.install_as_MySQLdb()
