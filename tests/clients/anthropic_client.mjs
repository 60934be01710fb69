// Run in the clients' npm folder: Anthropic's own.
import Anthropic from "@anthropic-ai/sdk";
import {
  ANSWER, ASK, ASK_AND_THINK, MODEL, SCHEMA, THINKING, URL, WEATHER, run, same,
} from "./report.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: "none", maxRetries: 0 });
const options = { model: MODEL, max_tokens: 500 };
const user = { role: "user", content: ASK };
const tool = { name: "weather", description: "How warm it is", input_schema: SCHEMA };

async function messages() {
  const answer = await client.messages.create({ ...options, messages: [user] });
  same(answer.content, [{ type: "text", text: ANSWER }]);
  same(answer.stop_reason, "end_turn");
  const count = await client.messages.countTokens({ model: MODEL, messages: [user] });
  const { input_tokens, cache_read_input_tokens } = answer.usage;
  same(count.input_tokens, input_tokens + cache_read_input_tokens);
  const failure = await client.messages
    .create({ ...options, model: "x", messages: [user] })
    .catch((error) => error);
  same([failure.status, failure.error.error.type], [404, "not_found_error"]);
}

async function stream() {
  const texts = [];
  const turn = { role: "user", content: ASK_AND_THINK };
  const events = client.messages.stream({ ...options, messages: [turn] });
  events.on("text", (text) => texts.push(text));
  const final = await events.finalMessage();
  same(texts.join(""), ANSWER);
  same([final.content[0].thinking, final.content[1].text], [THINKING, ANSWER]);
}

async function tools() {
  const events = client.messages.stream({ ...options, messages: [user], tools: [tool] });
  const first = await events.finalMessage();
  const call = first.content.find((block) => block.type === "tool_use");
  same([first.stop_reason, call.name, call.input], ["tool_use", "weather", WEATHER]);
  const result = { type: "tool_result", tool_use_id: call.id, content: "21" };
  const turns = [
    user,
    { role: "assistant", content: first.content },
    { role: "user", content: [result] },
  ];
  const last = await client.messages.create({ ...options, messages: turns, tools: [tool] });
  same(last.content[0].text, ANSWER);
}

async function schema() {
  const output_config = { format: { type: "json_schema", schema: SCHEMA } };
  const answer = await client.messages.create({ ...options, messages: [user], output_config });
  same(JSON.parse(answer.content[0].text), WEATHER);
}

await run({ messages, stream, tools, schema });
