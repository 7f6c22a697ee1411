"""A pipeline of one model in a folder of this host, for MLflow over Spark Connect.

MLflow lets Spark save a model and copies the files to this host with the driver's JVM, which a Connect client does not have.
Models of `pyspark.ml.connect` it asks to write the files themselves; what they hold is loaded by the class in the metadata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.ml import PipelineModel
from pyspark.ml.connect.base import Model
from pyspark.ml.pipeline import PipelineSharedReadWrite
from pyspark.ml.util import DefaultParamsWriter

from sparkhvd.estimator.saving.persistence import ModelWriter, write_metadata
from sparkhvd.spark import active_session, ml_context

if TYPE_CHECKING:
    from sparkhvd.estimator.params.base import TorchParams


class LocalPipeline(Model):
    """Pipeline of one model, which writes itself without a JVM; `PipelineModel.load` reads it."""

    def __init__(self, model: TorchParams) -> None:
        super().__init__()
        self.model = model

    def saveToLocal(self, path: str) -> None:  # noqa: N802 - MLflow's name
        """Write below a folder of this host, which does not exist, what `PipelineModel.save` writes where Spark resolves it."""
        spark = active_session()
        metadata = DefaultParamsWriter._get_metadata_to_save(
            PipelineModel([]),
            ml_context(spark),
            paramMap={"stageUids": [self.model.uid], "language": "Python"},
        )
        write_metadata(path, metadata)
        stage = PipelineSharedReadWrite.getStagePath(self.model.uid, 0, 1, f"{path}/stages")
        ModelWriter(self.model).session(spark).save_on_this_host(stage)
