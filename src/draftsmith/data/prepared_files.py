"""Parquet files of prepared documents, which say what they were prepared with."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from tqdm.auto import tqdm

from .files import written_whole


PREPARED_WITH = b"draftsmith.prepared_with"  # in the schema's metadata
ROW_GROUP = 1000  # documents


def write_prepared(documents: Dataset, path: Path, prepared_with: str) -> None:
    """Write documents as Parquet, with the fingerprint of `prepare.preparation_fingerprint`.

    Raises:
        OSError: it can't be written.
    """
    schema = documents.features.arrow_schema
    schema = schema.with_metadata({**(schema.metadata or {}), PREPARED_WITH: prepared_with.encode()})
    with (
        written_whole(path) as unfinished,
        pq.ParquetWriter(unfinished, schema, use_content_defined_chunking=True) as writer,
        tqdm(desc=f"Writing {path.name}", total=len(documents), unit="document", delay=1) as bar,
    ):
        for table in documents.with_format("arrow").iter(batch_size=ROW_GROUP):
            writer.write_table(table.cast(schema))
            bar.update(len(table))


def prepared_with(schema: pa.Schema) -> str | None:
    """The fingerprint in a file's schema; None for files of other tools."""
    found = (schema.metadata or {}).get(PREPARED_WITH)
    return None if found is None else found.decode(errors="replace")
