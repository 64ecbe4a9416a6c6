"""What the LlamaIndex tests stand on: tiny models, short documents, an embedding without a model, vector stores."""

import pytest

pytest.importorskip("llama_index.core")

import torch
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQueryResult
from llama_index.llms.rag_blend import BlendEvent
from llama_index_instrumentation import get_dispatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

BOS = "{{ bos_token }}"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXTS = {
    "ships": "The harbour master logs every vessel that passes the northern breakwater, with its tonnage.",
    "bees": "A colony of bees keeps its brood at thirty-five degrees, whatever the weather outside may be.",
    "clocks": "Quartz oscillators drift with temperature, so marine chronometers sit in gimballed boxes.",
    "bread": "Rye doughs are sour because wild yeast and lactic bacteria grow together over two long days.",
}


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads on a busy machine make a tiny model ten times slower. Import it to have it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Recorder(BaseEventHandler):
    """Keeps the events of the calls."""

    events: list[BlendEvent] = []  # noqa: RUF012  (pydantic copies it)

    def handle(self, event, **kwargs):
        if isinstance(event, BlendEvent):
            self.events.append(event)


@pytest.fixture
def recorder():
    handler = Recorder()
    get_dispatcher().add_event_handler(handler)
    yield handler
    get_dispatcher().event_handlers.remove(handler)


def byte_tokenizer(chat_template=None, adds_bos=True):
    """One token per byte, almost; like real tokenizers, it joins a chunk's full stop to the line break behind it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {letter: i + 2 for i, letter in enumerate(alphabet)}
    vocab |= {".Ċ": 258, ".ĊĊ": 259, "--": 260, "----": 261}
    merges = [(".", "Ċ"), (".Ċ", "Ċ"), ("-", "-"), ("--", "--")]
    core = Tokenizer(models.BPE(vocab, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_model(layers=3):
    """A random Llama for `byte_tokenizer`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=262, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def save_tiny_model(directory, chat=True):
    """Save one of them as `from_pretrained` reads it."""
    tiny_model().save_pretrained(directory)
    byte_tokenizer(BOS + CHAT_TEMPLATE if chat else None).save_pretrained(directory)
    return directory


class LetterEmbedding(BaseEmbedding):
    """Counts letters: equal texts are nearest, and nothing is random."""

    def _get_text_embedding(self, text):
        return [1.0 + text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]

    def _get_query_embedding(self, query):
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query):
        return self._get_text_embedding(query)


class TextStore(BasePydanticVectorStore):
    """Keeps whole nodes, as the database-backed stores do."""

    stores_text: bool = True
    flavour: str = "plain"
    rows: dict = {}  # noqa: RUF012  (pydantic copies it)

    @property
    def client(self):
        return "the client"

    def add(self, nodes, **kwargs):
        self.rows.update({node.node_id: node for node in nodes})
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id, **kwargs):
        for node_id in [i for i, node in self.rows.items() if node.ref_doc_id == ref_doc_id]:
            del self.rows[node_id]

    def delete_nodes(self, node_ids=None, filters=None, **kwargs):
        for node_id in node_ids:
            self.rows.pop(node_id, None)

    def clear(self):
        self.rows.clear()

    def get_nodes(self, node_ids=None, filters=None):
        return [node for i, node in self.rows.items() if node_ids is None or i in node_ids]

    def query(self, query, **kwargs):
        nodes = list(self.rows.values())[: query.similarity_top_k]
        return VectorStoreQueryResult(nodes=nodes, similarities=[1.0] * len(nodes), ids=[n.node_id for n in nodes])


def faiss_map_store():
    faiss = pytest.importorskip("faiss")
    stores = pytest.importorskip("llama_index.vector_stores.faiss")
    return stores.FaissMapVectorStore(faiss_index=faiss.IndexIDMap2(faiss.IndexFlatL2(26)))


def faiss_store():
    faiss = pytest.importorskip("faiss")
    stores = pytest.importorskip("llama_index.vector_stores.faiss")
    return stores.FaissVectorStore(faiss_index=faiss.IndexFlatL2(26))


def qdrant_store(use_async=False):
    """Qdrant inside this process; its two clients do not see each other's data."""
    qdrant = pytest.importorskip("qdrant_client")
    stores = pytest.importorskip("llama_index.vector_stores.qdrant")
    if use_async:
        return stores.QdrantVectorStore("tests", aclient=qdrant.AsyncQdrantClient(":memory:"))
    return stores.QdrantVectorStore("tests", client=qdrant.QdrantClient(":memory:"))


def documents(*names):
    return [Document(text=TEXTS[name], id_=name, metadata={"topic": name}) for name in names or TEXTS]


def make_index(docs, store=None, **options):
    return VectorStoreIndex.from_documents(
        docs,
        storage_context=StorageContext.from_defaults(vector_store=store or SimpleVectorStore()),
        embed_model=LetterEmbedding(),
        transformations=[SentenceSplitter(chunk_size=200, chunk_overlap=0)],
        **options,
    )


def llm_text(name, text=None):
    """The text of a document's only node as it stands in a prompt."""
    node = TextNode(text=text or TEXTS[name], metadata={"topic": name})
    return node.get_content(MetadataMode.LLM).strip()


def are_cached(llm, texts, head=None):
    """Whether each text is cached behind the head; leaves the cache as it was."""
    answers = []
    for text in texts:
        report = llm.engine.ingest([text], head=head or llm.head(), doc_ids=["probe"], progress=False)
        answers.append(report.chunks == 0)
        llm.engine.forget(["probe"])
    return answers
