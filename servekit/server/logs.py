"""How log records are written: for people, or one JSON object a line for machines."""

from __future__ import annotations

import datetime
import json
import logging

from servekit.config.schema import LogFormat


def set_up_logging(log_format: LogFormat) -> None:
    """Write every record from INFO on to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.json else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its start and stop are told in our own words


class TextFormatter(logging.Formatter):
    """Time, level if it is not INFO, text, and the facts of the record if it has any."""

    def __init__(self) -> None:
        super().__init__(datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        """One line."""
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        facts = "".join(f" {name}={value}" for name, value in getattr(record, "facts", {}).items()
                        if value not in (None, ""))
        return f"{self.formatTime(record, self.datefmt)} {level}{record.message}{facts}"

    def usesTime(self) -> bool:  # noqa: N802  (logging's name)
        """Never asked for by a format string here."""
        return False


class JsonFormatter(logging.Formatter):
    """One JSON object a record: ts, level, logger, message, and the facts of the record."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback is part of it."""
        line: dict[str, object] = {
            "ts": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname, "logger": record.name, "message": record.getMessage(),
            **getattr(record, "facts", {})}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
