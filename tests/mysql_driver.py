"""Lets Django's MySQL backend use PyMySQL, which installs without a C compiler."""

from importlib.util import find_spec


def install() -> None:
    """Use mysqlclient where it is installed, else PyMySQL in its place."""
    if find_spec("MySQLdb") is not None or find_spec("pymysql") is None:
        return
    import pymysql

    # Django asks for the mysqlclient version, not for PyMySQL's.
    pymysql.version_info = (2, 2, 7, "final", 0)
    pymysql.install_as_MySQLdb()
