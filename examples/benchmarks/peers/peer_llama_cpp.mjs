// llama.cpp through node-llama-cpp: flash attention on, going on from what a prompt shares with the last one.

import {createRequire} from "node:module";
import path from "node:path";
import process from "node:process";
import readline from "node:readline";
import {parseArgs} from "node:util";

// Found in the directory in which this is started, not beside this file.
const require = createRequire(path.join(process.cwd(), "here.js"));
const {getLlama, LlamaLogLevel} = await import(require.resolve("node-llama-cpp"));
const {version} = require(path.join(process.cwd(), "node_modules/node-llama-cpp/package.json"));

const LONGEST_PROMPT = 32768;

const {values} = parseArgs({options: {
    model: {type: "string"}, threads: {type: "string"}, directory: {type: "string"}
}});
const threads = Number(values.threads);
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads, logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: values.model});
const context = await model.createContext({
    contextSize: Math.min(model.trainContextSize, LONGEST_PROMPT), batchSize: 2048, flashAttention: true, threads
});
const sequence = context.getSequence();
const greedy = {temperature: 0, yieldEogToken: true};
const SMALLEST = -103; // log of what float32 can still tell from 0
let last = {tokens: [], cached: 0};

// Prefix only. The library could also close up gaps, but it does so at every single token that happens to match,
// and its own completion does not use it either.
async function keep(tokens) {
    await sequence.adaptStateToTokens(tokens, false);
    return sequence.nextTokenIndex;
}

async function next(tokens, metadata) {
    for await (const output of sequence.evaluateWithMetadata(tokens, metadata, greedy))
        return output;
}

function cpuSeconds() {
    const {user, system} = process.cpuUsage();
    return (user + system) / 1e6;
}

const operations = {
    async prepare() {
        return {};
    },
    async first_token({prompt}) {
        const started = cpuSeconds();
        const tokens = model.tokenize(prompt, true);
        const cached = await keep(tokens.slice(0, -1));
        const {token} = await next(tokens.slice(cached), {});
        last = {tokens, cached};
        return {cpu_s: cpuSeconds() - started, top1: token};
    },
    async details() {
        // Probabilities of a whole vocabulary take time: the last token is computed again for them.
        const {tokens, cached} = last;
        await keep(tokens.slice(0, -1));
        const {probabilities} = await next(tokens.slice(-1), {probabilities: true});
        const logprobs = new Float32Array(model.fileInfo.metadata.tokenizer.ggml.tokens.length).fill(SMALLEST);
        for (const [token, probability] of probabilities)
            logprobs[token] = Math.max(Math.log(probability), SMALLEST);
        return {
            prompt_tokens: tokens.length, cached_tokens: cached,
            logprobs: Buffer.from(logprobs.buffer).toString("base64")
        };
    }
};

function say(answer) {
    process.stdout.write(JSON.stringify(answer) + "\n");
}

say({id: 0, version, settings: {
    weights: path.basename(values.model), threads: context.idealThreads, "flash attention": context.flashAttention,
    "prefix cache": "the last prompt"
}});
for await (const line of readline.createInterface({input: process.stdin})) {
    const request = JSON.parse(line);
    say({id: request.id, ...await operations[request.op](request)});
}
process.exit(0);
