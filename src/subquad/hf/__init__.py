"""Hugging Face, both ways: `pip install 'subquad[hf]'`, then `import subquad.hf`.

Our models in their world: this import registers them, so AutoModelForCausalLM.from_pretrained(folder) and the like read
what `model.save` wrote, without remote code. `wrap` and `unwrap` do the same in memory.

Our attention in their models: `register` makes a pattern an attention implementation of transformers; `replace` puts
mechanisms in the place of a model's attention modules. `Decoder` generates with such a model as with one of ours.
"""

try:
    import transformers
except ImportError as error:
    raise ImportError("subquad.hf needs transformers: pip install 'subquad[hf]'") from error

from subquad.hf.attention import register
from subquad.hf.cache import SubquadCache
from subquad.hf.configuration import SubquadConfig
from subquad.hf.convert import convert
from subquad.hf.decoder import Decoder
from subquad.hf.linearise import LineariseSettings, Measures, linearise
from subquad.hf.modeling import (
    SubquadForCausalLM,
    SubquadForSequenceClassification,
    SubquadForTokenClassification,
    SubquadModel,
    unwrap,
    wrap,
)
from subquad.hf.replace import replace
from subquad.hf.tokenizer import byte_tokenizer

__all__ = [
    "Decoder",
    "LineariseSettings",
    "Measures",
    "SubquadCache",
    "SubquadConfig",
    "SubquadForCausalLM",
    "SubquadForSequenceClassification",
    "SubquadForTokenClassification",
    "SubquadModel",
    "byte_tokenizer",
    "convert",
    "linearise",
    "register",
    "replace",
    "unwrap",
    "wrap",
]

transformers.AutoConfig.register(SubquadConfig.model_type, SubquadConfig, exist_ok=True)
for auto, model in (
    (transformers.AutoModel, SubquadModel),
    (transformers.AutoModelForCausalLM, SubquadForCausalLM),
    (transformers.AutoModelForSequenceClassification, SubquadForSequenceClassification),
    (transformers.AutoModelForTokenClassification, SubquadForTokenClassification),
):
    auto.register(SubquadConfig, model, exist_ok=True)
del auto, model
