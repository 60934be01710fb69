// Run in the clients' npm folder: OpenAI's own.
import OpenAI from "openai";
import { ANSWER, ASK, ASK_AND_THINK, MODEL, SCHEMA, URL, WEATHER, run, same } from "./report.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: ASK }];
const parameters = SCHEMA;

async function chat() {
  const answer = await client.chat.completions.create({ model: MODEL, messages });
  same([answer.choices[0].message.content, answer.choices[0].finish_reason], [ANSWER, "stop"]);
}

async function stream() {
  const runner = client.chat.completions.stream({ model: MODEL, messages });
  const deltas = [];
  runner.on("content", (delta) => deltas.push(delta));
  same(await runner.finalContent(), ANSWER);
  same(deltas.join(""), ANSWER);
}

async function tools() {
  const calls = [];
  const fn = (given) => {
    calls.push(given);
    return "21";
  };
  const weather = { name: "weather", parameters, parse: JSON.parse, function: fn };
  const runner = client.chat.completions.runTools({
    model: MODEL,
    messages,
    stream: true,
    tools: [{ type: "function", function: weather }],
  });
  same(await runner.finalContent(), ANSWER);
  same(calls, [WEATHER]);
}

async function schema() {
  const json_schema = { name: "weather", schema: SCHEMA, strict: true };
  const response_format = { type: "json_schema", json_schema };
  const answer = await client.chat.completions.create({ model: MODEL, messages, response_format });
  same(JSON.parse(answer.choices[0].message.content), WEATHER);
}

async function responses() {
  const answer = await client.responses.create({ model: MODEL, input: ASK });
  same(answer.output_text, ANSWER);
  const tool = { type: "function", name: "weather", parameters, strict: true };
  const kinds = [];
  const events = client.responses.stream({ model: MODEL, input: ASK_AND_THINK, tools: [] });
  for await (const event of events) kinds.push(event.type);
  same([kinds[0], kinds.at(-1)], ["response.created", "response.completed"]);
  const first = await client.responses.create({ model: MODEL, input: ASK, tools: [tool] });
  const call = first.output.find((item) => item.type === "function_call");
  same(JSON.parse(call.arguments), WEATHER);
  const result = { type: "function_call_output", call_id: call.call_id, output: "21" };
  const last = await client.responses.create({
    model: MODEL,
    input: [result],
    previous_response_id: first.id,
    tools: [tool],
  });
  same(last.output_text, ANSWER);
}

await run({ chat, stream, tools, schema, responses });
